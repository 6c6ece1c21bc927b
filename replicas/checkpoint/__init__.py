"""A model read from its files without transformers, by what an earlier start has seen that make of them."""

from replicas.checkpoint.plain_recipe import PlainRecipe, recipe_of
from replicas.checkpoint.vocabulary import Vocabulary, load_vocabulary

__all__ = ["PlainRecipe", "Vocabulary", "load_vocabulary", "recipe_of"]
