// Request a plan and act on each step as soon as it is whole.
//
//   g++ -std=c++17 -I serving/client docs/examples/plan.cpp -lzmq -o plan
//   ./plan tcp://127.0.0.1:5571 "Bring the cup to the table."
//
// Debian: libzmq3-dev cppzmq-dev nlohmann-json3-dev.
#include <exception>
#include <iostream>
#include <string>
#include <tdp.hpp>

// Print steps as they come, then how the plan ended. Returns 0 for a whole and valid plan.
int plan(const std::string& endpoint, const std::string& prompt) {
  tdp::Client client(endpoint);
  tdp::Plan plan(client, {{"prompt", prompt}, {"stream", "steps"}, {"deadline_ms", 10000}});
  while (auto event = plan.next()) {
    const tdp::json& reply = *event;
    if (reply["type"] == "chunk") {
      std::cout << "step " << reply["step"]["skill"] << " " << reply["step"]["args"] << std::endl;
    } else if (tdp::whole(reply)) {
      std::cout << "done " << reply["usage"]["output_tokens"] << " tokens" << std::endl;
      return 0;
    } else {  // cut short, wrong, or a text without a plan
      std::cout << "failed " << reply["status"] << " " << reply["finish_reason"] << std::endl;
    }
  }
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: plan ENDPOINT TEXT\n";
    return 2;
  }
  try {
    return plan(argv[1], argv[2]);
  } catch (const tdp::Error& error) {
    std::cout << "refused " << error.what() << std::endl;
    return 1;
  } catch (const std::exception& error) {  // a malformed endpoint, a text that is not UTF-8
    std::cerr << "plan: " << argv[1] << ": " << error.what() << "\n";
    return 2;
  }
}
