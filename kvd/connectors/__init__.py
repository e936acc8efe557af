"""What serving engines load to use kvd: one room for each engine.

``vllm``: a KV connector; ``transformers``: ``generate`` with the node's cache; ``lmcache``: a tier
of LMCache's server; ``sglang``: a storage of its HiCache. ``identity``: whose KV is whose, in the
words of any of them. ``daemon_link``: the session of those that may wait for an answer;
``refusals``: how their calls end. An engine's own types stay in one module of its room; the rest
runs, and is tested, without it.
"""
