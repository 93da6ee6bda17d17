"""BibTeX of the sources of bounds, by key."""

BIBTEX = {
    "kim2021lipschitz": """@inproceedings{kim2021lipschitz,
  title     = {The {L}ipschitz Constant of Self-Attention},
  author    = {Kim, Hyunjik and Papamakarios, George and Mnih, Andriy},
  booktitle = {International Conference on Machine Learning},
  year      = {2021}
}""",
    "hu2024specformer": """@inproceedings{hu2024specformer,
  title     = {{SpecFormer}: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization},
  author    = {Hu, Xixu and Zheng, Runkai and Wang, Jindong and Leung, Cheuk Hang and Wu, Qi and Xie, Xing},
  booktitle = {European Conference on Computer Vision},
  pages     = {345--362},
  year      = {2024}
}""",
    "castin2024smooth": """@inproceedings{castin2024smooth,
  title     = {How Smooth Is Attention?},
  author    = {Castin, Val{\\'e}rie and Ablin, Pierre and Peyr{\\'e}, Gabriel},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
  note      = {arXiv:2312.14820}
}""",
    "yudin2025pay": """@misc{yudin2025pay,
  title  = {Pay Attention to Attention Distribution: A New Local {L}ipschitz Bound for Transformers},
  author = {Yudin, Nikolay and Gaponov, Alexander and Kudriashov, Sergei and Rakhuba, Maxim},
  year   = {2025},
  note   = {arXiv:2507.07814}
}""",
    "lipbound2026": """@misc{lipbound2026,
  title  = {lipbound: exact local {L}ipschitz constants of attention heads, and every published bound},
  author = {{The lipbound developers}},
  year   = {2026},
  note   = {Software}
}""",
}
