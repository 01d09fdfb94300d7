"""Export a student to an architecture that inference engines have, and check it on prompts.

    hf-memory convert path/or/repo/of/a/llama --servable --text my_text.txt --output student
    python examples/serve_a_student.py student served "Once upon a time" "The capital of France is"
    vllm serve served                                    # for many users at once

`served` needs none of our code. Students that are not servable run in vLLM with our plugin.
"""

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_memory

if len(sys.argv) < 4:
    sys.exit(__doc__)
folder, served, *prompts = sys.argv[1:]
student = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

hf_memory.export_model(student, served)  # refuses a student that no engine has, and says what to do
tokenizer.save_pretrained(served)
exported = AutoModelForCausalLM.from_pretrained(served)
print(f"the {type(student).__name__} is a {type(exported).__name__} in {served}")

batch = tokenizer(prompts, return_tensors="pt", padding=True)
with torch.no_grad():
    written = [
        model.generate(**batch, max_new_tokens=20, do_sample=False) for model in (student, exported)
    ]
print("both write the same:", torch.equal(*written))
for text in tokenizer.batch_decode(written[1], skip_special_tokens=True):
    print(f"- {text}")
