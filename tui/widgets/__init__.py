"""Widgets: what shows lines of spans, and what asks."""
