"""`weir bench peers`: weir beside llama.cpp, OpenVINO GenAI and transformers, on SmolLM2."""
