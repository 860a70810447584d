"""Ranks, groups and the collectives that training needs."""
