"""Models: they compute logits from a batch of tokens.

interface            what the engine requires of a model; read this first
loader               model directory -> Model
dtype                the dtype in which a model computes
families             the supported model families, as data, by kinship; add a family here
config_reader        config.json -> DecoderConfig (decoder_config.py of the worker)
weight_loader        checkpoint -> weights of a decoder
packed_weights       these weights in files, as the CPU kernels take them, for the next start
stacked_experts      a name for each expert's part of a checkpoint's joint tensors
weight_shapes        DecoderConfig -> shapes of these weights, without torch
decoder              DecoderModel, which computes all families
decoder_layer        the operations of a layer, run on tensors or written to a program for the CPU kernels
draft_head           DraftHead: a layer that drafts from the hidden states of the served model (MTP, EAGLE-3)
draft_head_config    what such heads compute, as data, without torch
t5                   T5Model: encoder-decoder models
encoder              EncoderModel: BERT and its relatives, which end in a vector
pooled_decoder       PooledDecoder: decoders that end in a vector
pooling_head         hidden states -> the vector of a text
transformers_model   fallback for other models, through transformers
"""
