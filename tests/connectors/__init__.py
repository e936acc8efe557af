"""What engines load: without the engines."""
