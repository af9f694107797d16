# GPT-2 small: 124 439 808 parameters with its vocabulary of 50257 ids.
# Use: source scripts/models/gpt2_small.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 1024
    --max-position-embeddings 1024
)
