# GPT-2 large: 774 030 080 parameters with its vocabulary of 50257 ids.
# Use: source scripts/models/gpt2_large.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 1280
    --num-attention-heads 20
    --seq-length 1024
    --max-position-embeddings 1024
)
