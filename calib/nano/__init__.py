"""Training of planner-nano: tokenizer, target, drafter and their export. The only part of the
project that needs torch.
"""
