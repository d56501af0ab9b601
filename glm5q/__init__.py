"""glm5q: quantize GLM-5 layer by layer, lower its three heavy ops, and say what it cost."""
