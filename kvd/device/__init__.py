"""What engines do on their devices: collectives, attention, memory. Neither core nor client."""
