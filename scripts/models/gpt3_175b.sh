# GPT-3 175B of arXiv 2005.14165, table 2.1, with attention over all tokens in every block.
# The 8 ranks of a node share its layers, as is usual for this size; --tensor-model-parallel-size 1 after it undoes that.
# Use: source scripts/models/gpt3_175b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --tensor-model-parallel-size 8 --sequence-parallel
)
