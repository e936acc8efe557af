"""Widgets that several pages share: what shows lines, and what asks the operator.

Read first, in order: ``canvas`` (lines that are repainted only where they differ), ``table`` (a
window of a table that the daemon sorts and filters), ``card`` (what is open), ``dialogs`` (menus
and questions over the page), ``commandbar`` (``:`` and ``/``). ``head`` is the first
line, ``pools`` and ``page_map`` the memory. A panel that one page has lives with that page.

What must not live here: what to ask the daemon for beside one's own lines, and what keys mean.
"""
