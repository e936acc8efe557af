"""What serving engines load to use kvd: one room for each engine.

``vllm``: a KV connector. An engine's own types stay in one module of its room; the rest runs, and
is tested, without it.
"""
