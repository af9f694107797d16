# Llama 2 7B: 6 738 415 616 parameters with its vocabulary of 32000 ids.
# Use: source scripts/models/llama2_7b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 4096
    --ffn-hidden-size 11008
    --position-embedding-type rope
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
