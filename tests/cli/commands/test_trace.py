"""`excite trace`"""


def test_the_table_of_a_model_is_printed(excite):
    status, out, _ = excite("trace", "papers-cnn", "--shape", "3x32x32")
    assert status == 0
    assert "3×32×32" in out
    assert "channel" in out
    options = ("--option", "in_features=5", "--option", "out_features=2")
    assert excite("trace", "torch.nn:Linear", "--shape", "5", *options)[0] == 0


def test_bad_input_is_refused(refused):
    refused("cannot import 'nope'", "trace", "nope:thing", "--shape", "3")
    refused("expected sizes such as 3x32x32", "trace", "papers-cnn", "--shape", "big")
    refused("does not run on a few samples of the example (shapes (2, 5))", "trace", "papers-cnn", "--shape", "5")
    refused("expected name=value", "trace", "torch.nn:Linear", "--shape", "3", "--option", "x")
