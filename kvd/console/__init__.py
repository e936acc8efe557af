"""What consoles see of the node: views of its state, cut to a screen, and paid from a budget."""
