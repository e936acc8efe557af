"""Audit: what must be true of a node between two steps, and what is done where it is not.

What lives here: the invariants I1 to I10 as rules, the standing audit that looks at a living node
slice by slice, what it found and for how long, and how a broken thing is kept from everybody.
What must not: a change of state for any other reason than a broken rule.

Read first, in this order:

- ``invariants.faults``: every rule at once, and the list of what they are
- ``rules.Fault`` and the rules of pages, tree nodes, leases, handoffs and the queue;
  ``component_rules`` has those of the components beside the first
- ``backrefs.Backrefs``: who refers to whom, turned round, for one look
- ``sweep.Sweep``: the same rules in slices, and why pages that lay still must be seen once
- ``containment.Containment``: per rule, what is done; ``findings.Findings``: what was told
"""
