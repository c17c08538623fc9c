// The end of a step: the scores of all tokens, or no more of them than a row needs that draws the likeliest.
//
// Where nobody asks for the scores themselves they never reach memory: a panel of them leaves the product as a peak.
#include "head.h"

namespace tgi {
namespace {

LinearCall product(const HeadCall& call) {
    LinearCall found{call.x, call.weight, call.bias};
    found.rows = call.rows;
    found.then = Then::score;
    found.scoring = call.scoring;
    found.next = call.next;
    return found;
}

}  // namespace

void scores(Team& team, const HeadCall& call, float* wide) {
    LinearCall all = product(call);
    all.wide = wide;
    linear(team, all);
}

void head(Team& team, const HeadCall& call, const Peaks& peaks, const Best& best) {
    LinearCall noted = product(call);
    noted.peaks = &peaks;
    linear(team, noted);
    gather(team, peaks, best);
}

}  // namespace tgi
