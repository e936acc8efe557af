"""Drawing: figures become lines of spans. Pure: no terminal, no widget, no clock, no colour.

A span has text and the name of a style; what colour that is, if any, is decided in one place, by
the shell. Nothing here is told by colour alone: there is always a letter, a shape or a figure too.
"""
