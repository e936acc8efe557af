"""What serving engines load to use kvd: one room for each engine.

``vllm``: a KV connector. ``identity``: whose KV is whose, in the words of any of them. An engine's
own types stay in one module of its room; the rest runs, and is tested, without it.
"""
