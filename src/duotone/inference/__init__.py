"""Batches of prompts through one cache: pictures encoded once, greedy answers, comparisons."""
