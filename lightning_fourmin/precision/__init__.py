"""FP16 and BF16 computing with FP32 masters: weight copies, loss scale, overflow."""
