# Llama 2 13B: 13 015 864 320 parameters with its vocabulary of 32000 ids.
# Use: source scripts/models/llama2_13b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 5120
    --num-attention-heads 40
    --seq-length 4096
    --ffn-hidden-size 13824
    --position-embedding-type rope
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
