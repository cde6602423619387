"""shardd.Optimizer in torch's place, on one rank."""

import copy
import unittest
import warnings

import torch

import harness
import shardd


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)


def train(model, optimizer, steps, scheduler=None, backwards=1):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(backwards):
            x, y = batch(100 * step + part)
            loss = ((model(x) - y) ** 2).mean() / backwards
            loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


class Optimizer(harness.DaemonCase):
    def assert_close(self, a, b, tolerance=2e-6):
        for (name, p), q in zip(a.named_parameters(), b.parameters()):
            self.assertLessEqual((p - q).abs().max().item(), tolerance, name)

    def pair(self, **options):
        model = make_model()
        reference = copy.deepcopy(model)
        optimizer = shardd.Optimizer(model, job=self.job(), **options)
        self.addCleanup(optimizer.close)
        hyper = {k: v for k, v in options.items() if k in ("lr", "betas", "eps", "weight_decay")}
        return model, optimizer, reference, torch.optim.AdamW(reference.parameters(), **hyper)

    def test_matches_adamw_at_every_stage(self):
        for stage in range(3):
            model = make_model()
            reference = copy.deepcopy(model)
            theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
            with shardd.Optimizer(model, job=f"{self.job()}-{stage}", stage=stage, lr=1e-2,
                                  weight_decay=0.1) as ours:
                train(model, ours, range(20))
                train(reference, theirs, range(20))
                self.assert_close(model, reference)
                self.assertEqual(ours.last.applied, 20)

    def test_weights_come_back_during_the_next_forward(self):
        for stage in (1, 2):
            model, reference = make_model(), make_model()
            theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
            with shardd.Optimizer(model, job=f"{self.job()}-{stage}", stage=stage, lr=1e-2,
                                  overlap=True) as ours:
                for step in range(8):
                    train(model, ours, [step])
                    self.assertTrue(any(u.verb for u in ours._overlap._units))
                    train(reference, theirs, [step])
                    if step % 3 == 0:
                        for name, values in model.state_dict().items():
                            expected = reference.state_dict()[name]
                            self.assertLessEqual((values - expected).abs().max().item(), 2e-6)
                self.daemon.restart()
                try:
                    train(model, ours, [8])
                except shardd.Regrouped:
                    self.assertEqual(stage, 2)  # gradients had been given up
                    train(model, ours, [8])
                train(reference, theirs, [8])
            self.assert_close(model, reference)

    def test_several_backwards_a_step_and_leftovers(self):
        model, ours, reference, theirs = self.pair(lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for backwards in (3, 3, 1, 3, 2, 4, 4):  # also fewer and more than in steps before
                train(model, ours, [backwards], backwards=backwards)
                train(reference, theirs, [backwards], backwards=backwards)
                self.assert_close(model, reference)

    def test_more_backwards_than_were_said_at_stage_2_are_refused_by_name(self):
        model = make_model()
        with shardd.Optimizer(model, job=self.job(), stage=2) as ours:
            train(model, ours, range(2))
            with self.assertRaisesRegex(RuntimeError, "'2.*' got another gradient.*accumulation=2"):
                train(model, ours, [2], backwards=2)
            model.zero_grad()

    def test_gradients_leave_during_backward(self):
        model, ours, _, _ = self.pair()
        train(model, ours, range(1))
        x, y = batch(1)
        ours.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        self.assertTrue(all(p.sent for p in ours.parameters))

    def test_scheduler_and_groups(self):
        model, reference = make_model(), make_model()

        def groups(m):
            return [{"params": m[0].parameters(), "lr": 3e-2},
                    {"params": m[2].parameters(), "weight_decay": 0.0}]
        theirs = torch.optim.AdamW(groups(reference), lr=1e-2)
        with shardd.Optimizer(groups(model), lr=1e-2, job=self.job()) as ours:
            for m, o in ((model, ours), (reference, theirs)):
                train(m, o, range(10), torch.optim.lr_scheduler.CosineAnnealingLR(o, 10))
            self.assert_close(model, reference)
            records = ours.step_records()
            self.assertEqual([r.step for r in records], list(range(1, 11)))
            self.assertEqual(records[0].lr, 3e-2)  # of the first group
            self.assertLess(records[9].lr, records[8].lr)

    def test_other_rules_match_torchs_and_go_on_there(self):
        for number, (name, theirs, options) in enumerate((
                ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
                ("adam", torch.optim.Adam, {"amsgrad": True}),
                ("adamw", torch.optim.AdamW, {"amsgrad": True}),
                ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
                ("sgd", torch.optim.SGD, {}),
                ("adagrad", torch.optim.Adagrad, {"lr_decay": 0.01}),
                ("rmsprop", torch.optim.RMSprop, {"momentum": 0.9, "alpha": 0.95}))):
            with self.subTest(name, **options):
                model, reference = make_model(), make_model()
                other = theirs(reference.parameters(), lr=1e-2, **options)
                with shardd.Optimizer(model, 1e-2, optimizer=name, job=f"{self.job()}-{number}",
                                      **options) as ours:
                    train(model, ours, range(10))
                    train(reference, other, range(10))
                    self.assert_close(model, reference, 2e-5)
                    other = theirs(reference.parameters(), lr=1.0)
                    reference.load_state_dict(model.state_dict())
                    other.load_state_dict(ours.state_dict())
                    ours.load_state_dict(other.state_dict())  # and back, as another state
                    ours._stamp = ""
                    ours.load_state_dict(other.state_dict())
                    train(model, ours, range(10, 15))
                    train(reference, other, range(10, 15))
                    self.assert_close(model, reference, 4e-5)

    def test_lion_and_lamb(self):
        for name in ("lion", "lamb"):
            model = make_model()
            with shardd.Optimizer(model, 1e-3, optimizer=name, job=f"{self.job()}-{name}") as ours:
                losses = train(model, ours, [0] * 20)
                self.assertLess(losses[-1], losses[0])

    def test_state_dict_goes_to_torch_and_the_run_goes_on_there(self):
        model, ours, reference, theirs = self.pair(lr=1e-2)
        train(model, ours, range(5))
        reference.load_state_dict(model.state_dict())
        theirs.load_state_dict(ours.state_dict())
        train(model, ours, range(5, 10))
        train(reference, theirs, range(5, 10))
        self.assert_close(model, reference)

    def test_state_dict_that_was_just_read_is_put_back_at_no_cost(self):
        model, ours, _, _ = self.pair()
        train(model, ours, range(3))
        session = ours._session
        ours.load_state_dict(ours.state_dict())
        self.assertIs(ours._session, session)
        self.assertEqual(ours.last.step, 3)

    def test_closures_are_refused(self):
        model, ours, _, _ = self.pair()
        with self.assertRaisesRegex(TypeError, "takes no closure.*loss = closure"):
            ours.step(lambda: 0)

    def test_options_that_are_refused_say_why(self):
        for options, word in (({"optimizer": "sgd", "amsgrad": True}, "of adam and adamw"),
                              ({"maximize": True}, "negate"),
                              ({"optimizer": "rmsprop", "centered": True}, "no mean"),
                              ({"optimizer": "adamax"}, "adamw"), ({"wieght": 1}, "wieght"),
                              ({"grad_dtype": "fp64"}, "fp32"), ({"resume": "no"}, "resume")):
            with self.assertRaisesRegex((TypeError, ValueError), word):
                shardd.Optimizer(make_model(), job=self.job(), **options)

    def test_max_norm_clips_in_the_daemon(self):
        model, ours, reference, theirs = self.pair(max_norm=0.05, lr=1e-2)
        for step in range(5):
            train(model, ours, [step])
            x, y = batch(100 * step)
            theirs.zero_grad()
            ((reference(x) - y) ** 2).mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            theirs.step()
            self.assertAlmostEqual(ours.last.grad_norm, norm.item(), places=5)
        self.assert_close(model, reference)

    def test_clip_grad_norm_is_done_as_said_and_spoken_of_once(self):
        for options, word in (({}, "Give max_norm"), ({"max_norm": 0.05}, "clipped twice")):
            model = make_model()
            reference = copy.deepcopy(model)
            theirs = torch.optim.AdamW(reference.parameters())
            said = []
            with shardd.Optimizer(model, job=f"{self.job()}-{len(options)}", **options) as ours:
                for m, o in ((model, ours), (reference, theirs)):
                    for step in range(4):
                        x, y = batch(step)
                        o.zero_grad()
                        ((m(x) - y) ** 2).mean().backward()
                        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
                        with warnings.catch_warnings(record=True) as caught:
                            warnings.simplefilter("always")
                            o.step()
                        said += [str(w.message) for w in caught]
            self.assertEqual(len(said), 1, said)
            self.assertIn(word, said[0])
            self.assert_close(model, reference)

    def test_clipping_that_begins_after_gradients_were_streamed(self):
        model, ours, reference, theirs = self.pair()
        train(model, ours, range(3))
        train(reference, theirs, range(3))
        for m, o in ((model, ours), (reference, theirs)):
            x, y = batch(7)
            o.zero_grad()
            ((m(x) - y) ** 2).mean().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            if o is ours:
                with self.assertWarnsRegex(UserWarning, "max_norm"):
                    o.step()
            else:
                o.step()
        self.assert_close(model, reference)

    def test_grad_scaler(self):
        for given in (False, True):
            model, reference = make_model(), make_model()
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            their_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            theirs = torch.optim.AdamW(reference.parameters())
            with shardd.Optimizer(model, job=f"{self.job()}-{given}",
                                  grad_scaler=scaler if given else None) as ours:
                for step in range(8):
                    for m, o, s in ((model, ours, scaler), (reference, theirs, their_scaler)):
                        x, y = batch(step)
                        if step == 4:
                            x = x * float("inf")
                        o.zero_grad()
                        with torch.autocast("cpu", torch.bfloat16):
                            loss = ((m(x) - y) ** 2).mean()
                        s.scale(loss).backward()
                        s.step(o)
                        s.update()
                    self.assertEqual(ours.last.skipped, step == 4)
                    self.assertEqual(scaler.get_scale(), their_scaler.get_scale())
                self.assertEqual(ours.last.applied, 7)
                self.assert_close(model, reference)

    def test_groups_cannot_be_added_later(self):
        _, ours, _, _ = self.pair()
        with self.assertRaisesRegex(RuntimeError, "layout is fixed"):
            ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})

    def test_a_closed_optimizer_says_so(self):
        model, ours, _, _ = self.pair()
        ours.close()
        with self.assertRaisesRegex(shardd.Error, "was closed"):
            ours.step()
        train(model, torch.optim.SGD(model.parameters()), range(1))  # no hook is left


if __name__ == "__main__":
    harness.main()
