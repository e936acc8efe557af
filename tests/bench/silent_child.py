"""A child that says nothing, until its input ends."""

import sys

sys.stdin.read()
