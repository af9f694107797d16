# GPT-2 medium: 354 823 168 parameters with its vocabulary of 50257 ids.
# Use: source scripts/models/gpt2_medium.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
)
