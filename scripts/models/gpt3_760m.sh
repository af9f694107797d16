# GPT-3 760M of arXiv 2005.14165, table 2.1, with attention over all tokens in every block.
# Use: source scripts/models/gpt3_760m.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1536
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
)
