"""Training of planner-nano: tokenizer, target, drafter and their export. The only folder of the
project that needs torch.
"""
