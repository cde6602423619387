// A user's trainer, as small as they get: built outside of the workspace with what
// pkg-config says, it trains one parameter for one step.
#include <shardd/client.h>

#include <cstdio>

int main() {
  auto options = shardd::SessionOptions::FromEnvironment();
  if (!options.ok()) return 1;
  shardd::JobOptions job;
  job.name = "one-step";
  job.grad_dtype = job.weight_dtype = shardd::DType::kFloat32;
  job.groups[0].lr = 0.5;
  auto session = shardd::Session::Open(*options, job, {{.name = "w", .shape = {1}}});
  if (!session.ok()) return std::fprintf(stderr, "%s\n", session.status().ToString().c_str()), 1;
  const float one = 1;
  if (!(*session)->Upload(0, 0, {&one, 1}).ok() || !(*session)->FinishUpload().ok()) return 2;
  auto grad = (*session)->AcquireGrad(0, 0);
  if (!grad.ok()) return 3;
  *static_cast<float*>(*grad) = 2;
  if (!(*session)->ReadyGrad(0, 0).ok()) return 4;
  if (!(*session)->EndStep({.slots = {{.loss = 3}}}).ok()) return 5;
  auto decision = (*session)->WaitDecision();
  auto weight = (*session)->WaitWeights(0);
  if (!decision.ok() || !weight.ok()) return 6;
  // The first step of AdamW moves by lr against the gradient, and decays.
  std::printf("step %d weight %.3f\n", static_cast<int>(decision->step),
              *static_cast<const float*>(*weight));
  return (*session)->Close().ok() ? 0 : 7;
}
