# GPT-3 1.3B of arXiv 2005.14165, table 2.1, with attention over all tokens in every block.
# Its table has 24 heads of 128 channels, which would be 3072 values instead of 2048; here there are 16.
# Use: source scripts/models/gpt3_1.3b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
)
