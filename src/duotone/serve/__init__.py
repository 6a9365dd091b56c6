"""duotone in vLLM: pages of few bits, and the plug-in that serves them."""
