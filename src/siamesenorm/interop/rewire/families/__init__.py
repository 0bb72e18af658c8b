"""The families of blocks that rewire knows, by the full name of their class: a subclass may compute anything."""

from siamesenorm.interop.rewire.anatomy import Reading
from siamesenorm.interop.rewire.families import decoder, dit, gpt2, gpt_neox, vision

FAMILIES: dict[str, Reading] = {
    **decoder.BLOCKS,
    **gpt2.BLOCKS,
    **gpt_neox.BLOCKS,
    **vision.BLOCKS,
    **dit.BLOCKS,
}
