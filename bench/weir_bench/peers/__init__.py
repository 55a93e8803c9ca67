"""`weir bench peers`: compare weir with llama.cpp, OpenVINO GenAI and transformers."""
