"""The all-reduce of one stage's gradients: plan, frames, codec, algorithm. No process of its
own."""
