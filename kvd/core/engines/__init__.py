"""What each request of an engine does: a verb of the client API is a method.

- ``engines.Engines``: the table of requests and who has each; what is asked of namespaces, prompts
  and the node; what processes of a session say by themselves;
- ``lease_verbs``, ``receive_verbs``, ``send_verbs``: leases, the decode side, the prefill side;
  ``verbs.Verbs`` has what all of them read.

Each checks whose a thing is and what was asked, and leaves the doing to the room that has it:
``kvd.core.leases`` and ``kvd.core.handoff``.
"""
