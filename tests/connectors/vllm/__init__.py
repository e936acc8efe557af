"""The connector of vLLM, without vLLM."""
