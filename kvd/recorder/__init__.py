"""The flight recorder: the inputs of the last minutes, and the state of the node before them."""
