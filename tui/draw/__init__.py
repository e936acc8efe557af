"""Drawing: figures become lines of styled text. Pure: no terminal, no widget, no clock, no colour.

Read first, in order: ``spans`` (styled text, and cutting and joining it by columns), ``chart``
(over time), ``bars`` (a whole and its parts), ``phases`` (a handoff over time), ``page_map`` (the
pages of a component).

A piece of text has the name of a style; what colour that is, if any, is decided in one place,
``tui.themes``. Nothing here is told by colour alone: there is always a letter, a shape or a figure.
"""
