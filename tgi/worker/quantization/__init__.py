"""Quantized weights: their representation, their creation at load, and the checkpoint formats that bring them.

Read weight.py first: QuantizedWeight, the one representation that all layers and kernels take. Then:

- weight_forms: sizes of weights in each form, and what a checkpoint's config says of a layer, without torch,
- quantize: --quantize int8, int4 and fp8, from plain weights,
- float8: which devices keep 8-bit floats, and torch's products with them,
- scheme: what a model directory and --quantize ask for together,
- weight_sources: the loader's interface to weights in any form,
- gptq, awq, compressed_tensors, fp8, modelopt, mxfp4: one checkpoint format each; affine (integers with zero points),
  float4 (4-bit floats), config (the quantization entry of config.json) and layer_tensors (checked access to a layer's
  tensors) are their common parts.
"""
