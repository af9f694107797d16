# GPT-3 6.7B of arXiv 2005.14165, table 2.1, with attention over all tokens in every block.
# Use: source scripts/models/gpt3_6.7b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
)
