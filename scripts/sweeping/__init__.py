"""Try small models of transformers on 3 ranks: how they are made, saved and judged."""
