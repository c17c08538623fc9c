"""The mixers of recurrent layers as data, without torch: sizes, what a layer keeps of a request, and the shapes of its
weights. What they compute is in the modules of the same names in `layers`.

interface    what each of them has; read this first
short_conv   the gated short convolution of LFM2
gated_delta  the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid
mamba2       state space duality, of Mamba2, Granite 4, Nemotron-H, Bamba and Falcon-H1
"""
