# GPT-2 XL: 1 557 611 200 parameters with its vocabulary of 50257 ids.
# Use: source scripts/models/gpt2_xl.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 1600
    --num-attention-heads 25
    --seq-length 1024
    --max-position-embeddings 1024
)
