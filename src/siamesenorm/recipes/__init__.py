"""Recipes: experiments as generators of plans, with the reports on them."""
