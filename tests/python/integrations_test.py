"""Hugging Face's Trainer and Accelerate: training, saving and resuming by their own calls."""

import copy
import pathlib
import tempfile
import warnings

import accelerate
import torch
import transformers

import gpt2_script
import harness
import shardd


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = gpt2_script.tokens(index, 0)[0]
        return {"input_ids": row, "labels": row}


def largest_difference(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


class HuggingFace(harness.DaemonCase):
    def trainer(self, directory, model, optimizer, steps, clip):
        arguments = transformers.TrainingArguments(
            output_dir=str(directory), max_steps=steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, save_steps=4, logging_steps=1, report_to=[],
            use_cpu=True, max_grad_norm=clip, seed=1, disable_tqdm=True,
            learning_rate=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / 10)
        return transformers.Trainer(model=model, args=arguments, train_dataset=Texts(),
                                    optimizers=(optimizer, schedule))

    def ours(self, model, name, **options):
        optimizer = shardd.Optimizer(model, lr=1e-3, max_norm=0.5, job=f"{self.job()}-{name}",
                                     **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def test_trainer_trains_saves_and_resumes(self):
        start = gpt2_script.make_model()
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*max_norm.*")
            directory = pathlib.Path(name)
            reference = copy.deepcopy(start)
            adamw = torch.optim.AdamW(reference.parameters(), lr=1e-3)
            self.trainer(directory / "a", reference, adamw, 8, 0.5).train()

            for stage in (1, 2):
                model = copy.deepcopy(start)
                whole = self.trainer(directory / f"b{stage}", model,
                                     self.ours(model, f"b{stage}", stage=stage), 8, 0.0)
                whole.train()
                self.assertLessEqual(largest_difference(model, reference), 2e-5)
                losses = [e["loss"] for e in whole.state.log_history if "loss" in e]
                self.assertEqual(len(losses), 8)
                self.assertLess(losses[-1], losses[0])

                # In another process it would be the same: a new model, optimizer and job.
                second = gpt2_script.make_model()
                resumed = self.trainer(directory / f"b{stage}", second,
                                       self.ours(second, f"c{stage}", stage=stage), 8, 0.0)
                resumed.train(resume_from_checkpoint=str(directory / f"b{stage}/checkpoint-4"))
                self.assertEqual(resumed.state.global_step, 8)
                self.assertLessEqual(largest_difference(second, model), 1e-6)

                # And what ours saved goes on in torch's AdamW.
                third = gpt2_script.make_model()
                left = self.trainer(directory / f"b{stage}", third,
                                    torch.optim.AdamW(third.parameters(), lr=1e-3), 8, 0.5)
                left.train(resume_from_checkpoint=str(directory / f"b{stage}/checkpoint-4"))
                self.assertLessEqual(largest_difference(third, model), 2e-5)

    def accelerated(self, accelerator, model, optimizer, steps, first=0):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for index, batch in enumerate(loader):
            if index < first:
                continue
            if index == steps:
                break
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return schedule

    def test_accelerate_trains_saves_and_resumes(self):
        start = gpt2_script.make_model()
        reference, model = copy.deepcopy(start), copy.deepcopy(start)
        adamw = torch.optim.AdamW(reference.parameters(), lr=1e-3)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.accelerated(accelerator, reference, adamw, 12)

        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = shardd.Optimizer(model, lr=1e-3, job=f"{self.job()}-a")
        self.addCleanup(optimizer.close)
        with tempfile.TemporaryDirectory() as directory:
            self.accelerated(accelerator, model, optimizer, 6)
            accelerator.save_state(directory)
            third = gpt2_script.make_model()
            another = shardd.Optimizer(third, lr=1.0, job=f"{self.job()}-b")
            self.addCleanup(another.close)
            fresh = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            schedule = torch.optim.lr_scheduler.StepLR(another, 3, 0.5)
            loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
            prepared = fresh.prepare(third, another, loader, schedule)
            fresh.load_state(directory)
        for index, batch in enumerate(prepared[2]):
            if 6 <= index < 12:
                with fresh.accumulate(prepared[0]):
                    fresh.backward(prepared[0](**batch).loss)
                    prepared[1].step()
                    prepared[3].step()
                    prepared[1].zero_grad()
        self.assertLessEqual(largest_difference(third, reference), 2e-5)


if __name__ == "__main__":
    harness.main()
