"""From rollouts to packed global batches. Plain numpy: no torch, so the controller stays light."""
