"""A model's weights and tokenizer read from their files, as an earlier start has seen transformers do it."""

from samovar.replicas.checkpoint.plain_recipe import PlainRecipe, recipe_of
from samovar.replicas.checkpoint.vocabulary import Vocabulary, load_vocabulary

__all__ = ["PlainRecipe", "Vocabulary", "load_vocabulary", "recipe_of"]
