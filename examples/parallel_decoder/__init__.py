"""A small tensor- and expert-parallel decoder whose parameters carry their own weight loaders."""

from .config import DecoderConfig
from .decode import greedy, logits_of
from .models import Decoder, load_arguments, make_model

__all__ = ["Decoder", "DecoderConfig", "greedy", "load_arguments", "logits_of", "make_model"]
