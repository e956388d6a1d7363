"""FP16 and BF16 computing with FP32 master weights: the plugin, weight copies, loss scale, overflow, CPU products."""
