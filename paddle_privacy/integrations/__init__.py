"""Private training inside other people's loops. Import the module you need; each needs its own package.

* :mod:`paddle_privacy.integrations.paddlenlp`: PaddleNLP's ``Trainer``.
* :mod:`paddle_privacy.integrations.hapi`: ``paddle.Model.fit``.
* :mod:`paddle_privacy.integrations.visualdl`: curves in VisualDL.
"""
