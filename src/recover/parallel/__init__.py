"""Replicas of several ranks: where a rank stands (`mesh`), how its replica agrees (`inner`), and what FSDP2 (`fsdp`) and
pipelines (`pipeline`) need to be told. What runs inside a replica stays plain `torch.distributed`; nothing of it is patched.
"""
