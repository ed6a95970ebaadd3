"""Routing: logits, the choice of experts, the order by expert, local ids."""
